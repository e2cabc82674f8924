"""Chapter 1. Tune two LoRA specialists: one edits a text, the other writes one.

    python examples/field_trial/tune.py

The adapters are trained with the LoRA forward of `prepare_lora`; docs/lora.md compares it with
peft's own.
"""

from story import KINDS, begin, head


def main() -> None:
    story = begin(__doc__)
    if story is None:
        return
    head(story)
    story.row("base", lambda: story.load_model(story.model))
    rows = [
        story.row(f"specialist {kind}", lambda k=k: story.specialist(k))
        for k, kind in enumerate(KINDS)
    ]
    if not story.given.smoke:
        story.check_specialists([row for row in rows if row is not None])


if __name__ == "__main__":
    main()
