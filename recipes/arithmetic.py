"""Small sums in words. For `quickstart.yaml`; copy it and change it."""


def addition(largest: int = 19) -> list[dict[str, str]]:
    """Every sum of two numbers from 0 to `largest`: one row for each, with the question and the right answer."""
    return [
        {"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(largest + 1) for b in range(largest + 1)
    ]
