"""The reward of the addition recipe: a plain function, no import of vime needed."""


def score(text: str, answer: str, finish_reason: str, **_: object) -> float:
    """1.0 if what follows the working is exactly the sum and the model ended by itself, else 0.0.

    A run-on answer that happens to begin right is not right, hence the look at `finish_reason`.
    """
    right = text.rsplit("</think>", 1)[-1] == answer
    return float(right and finish_reason == "stop")
