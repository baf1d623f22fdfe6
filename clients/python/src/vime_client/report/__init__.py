"""What a run showed: `summary.json`, `report.html` and a picture for the terminal, all from the run folder's files.

`python -m vime_client.report RUN_DIR` writes them again at any time.
"""
