"""Sentences that are drawn for a reader are running text: no code, no tables, no headings."""

from tests.drawn_sentences import sentences_of

PAGE = """# A heading of some five words

A first sentence of the page. It has [a link](x.md#y) and
goes on in the next line.

* **An item.** A rank holds a part of it.

```bash
a command that is not a sentence here
```

| a table | is | not | running | text |
"""


def test_only_running_text_is_drawn():
    assert sentences_of(PAGE) == [
        "A first sentence of the page.",
        "It has [a link] and goes on in the next line.",
        "A rank holds a part of it.",
    ]
