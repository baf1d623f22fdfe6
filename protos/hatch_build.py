"""Generate the typed Python stubs of every contract when the distribution is built or installed.

Stubs are built, never committed: a committed copy drifts. An editable install does not notice an edited
`.proto`; `make protos` runs this hook again.
"""

from __future__ import annotations

import shutil
import sys
from importlib import resources
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class GenerateStubs(BuildHookInterface[Any]):
    """Run protoc over `vime/**/*.proto` into `python/vime/`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before each build target, editable installs included."""
        if self.target_name != "wheel":
            return
        from grpc_tools import protoc

        root = Path(self.root)
        out = root / "python"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        protos = sorted(str(p.relative_to(root)) for p in (root / "vime").rglob("*.proto"))
        well_known = str(resources.files("grpc_tools") / "_proto")
        # mypy-protobuf's plug-ins live beside the interpreter, which an isolated build does not put on PATH.
        bin_dir = Path(sys.executable).parent
        plugins = [
            f"--plugin=protoc-gen-{name}={found}"
            for name in ("mypy", "mypy_grpc")
            if (found := shutil.which(f"protoc-gen-{name}") or _existing(bin_dir / f"protoc-gen-{name}"))
        ]
        if len(plugins) != 2:
            raise RuntimeError("protoc-gen-mypy and protoc-gen-mypy_grpc (package mypy-protobuf) were not found")
        code = protoc.main(
            [
                "protoc",
                f"-I{root}",
                f"-I{well_known}",
                *plugins,
                f"--python_out={out}",
                f"--grpc_python_out={out}",
                f"--mypy_out={out}",
                f"--mypy_grpc_out={out}",
                *(str(root / p) for p in protos),
            ]
        )
        if code != 0:
            raise RuntimeError(f"protoc failed with code {code} over {len(protos)} files")
        for folder in [out / "vime", *(p for p in (out / "vime").rglob("*") if p.is_dir())]:
            (folder / "__init__.py").touch()
        (out / "vime" / "py.typed").touch()
        for proto in protos:  # the contracts travel with their stubs
            shutil.copy(root / proto, out / proto)


def _existing(path: Path) -> str | None:
    return str(path) if path.exists() else None
