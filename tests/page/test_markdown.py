"""The page's own renderer: what becomes of Markdown, whole and while it grows."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest

SOURCE = (files("spec_server.http") / "page" / "markdown.js").read_text("utf-8")


@pytest.fixture(scope="module")
def renderer(tab: Any) -> Any:
    tab.open("data:text/html,<title>empty</title>")
    # Block by block: without the copy button, which a page of no origin has not.
    tab.evaluate(f"""(() => {{ {SOURCE}
      window.view = () => new MarkdownView(document.createElement("div"));
      window.html = (view, text) => {{ view.show(text); return view.parent.innerHTML; }};
    }})()""")
    return tab


def html(tab: Any, text: str) -> str:
    return str(tab.evaluate(f"html(view(), {json.dumps(text)})"))


CODE = (
    '<figure class="code"><figcaption><span>{}</span></figcaption>'
    '<pre tabindex="0"><code>{}</code></pre></figure>'
)
LINK = '<a href="{0}" title="{0}" target="_blank" rel="noopener noreferrer nofollow">{1}</a>'
CASES = {
    "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
    "**bold** and *it* and ***both***": (
        "<p><strong>bold</strong> and <em>it</em> and <strong><em>both</em></strong></p>"
    ),
    "2 * 3 * 4 and 2*x*y, __init__ and a_b_c": "<p>2 * 3 * 4 and 2*x*y, __init__ and a_b_c</p>",
    "** no ** but **yes**": "<p>** no ** but <strong>yes</strong></p>",
    "`a*b` and `` c`d `` and *`e`*": (
        "<p><code>a*b</code> and <code>c`d</code> and <em><code>e</code></em></p>"
    ),
    r"\*no\* \`no\`": "<p>*no* `no`</p>",
    "an `open tick and <b>": "<p>an `open tick and &lt;b&gt;</p>",
    "# One\n### Three ###": "<h3>One</h3><h5>Three</h5>",
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "> quoted *it*\n> more": "<blockquote><p>quoted <em>it</em><br>more</p></blockquote>",
    "- a\n- b\n  - c\n\n- d": "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>",
    "3. a\n4. b\n- c": '<ol start="3"><li>a</li><li>b</li></ol><ul><li>c</li></ul>',
    "text\n1. a\n\n   b\n2. c": "<p>text</p><ol><li>a<p>b</p></li><li>c</li></ol>",
    "```python\na = '<b>'\n\n  # *x*\n```\nafter": CODE.format(
        "python", "a = '&lt;b&gt;'\n\n  # *x*"
    )
    + "<p>after</p>",
    "~~~\n```\n~~~": CODE.format("text", "```"),
    "```py\nopen": CODE.format("py", "open"),
    "1. do\n   ```sh\n   ls\n   ```\n2. end": (
        "<ol><li>do" + CODE.format("sh", "ls") + "</li><li>end</li></ol>"
    ),
    "|a|b|\n|-|:-:|\n|1|**2**|": (
        '<div class="table" tabindex="0"><table><thead><tr><th>a</th><th>b</th></tr></thead>'
        "<tbody><tr><td>1</td><td><strong>2</strong></td></tr></tbody></table></div>"
    ),
    "[t *i*](https://a.org/b_(c)?d=1)": "<p>"
    + LINK.format("https://a.org/b_(c)?d=1", "t <em>i</em>")
    + "</p>",
    "see https://a.org/x, or (http://b.org).": "<p>see "
    + LINK.format("https://a.org/x", "https://a.org/x")
    + ", or ("
    + LINK.format("http://b.org", "http://b.org")
    + ").</p>",
    "[`x`](javascript:alert) `y`": "<p>[<code>x</code>](javascript:alert) <code>y</code></p>",
    "![alt](https://a.org/i.png)": "<p>" + LINK.format("https://a.org/i.png", "alt") + "</p>",
    "\ue000 `x` \ue000": "<p>\ufffd <code>x</code> \ufffd</p>",
    "这是**重点**内容": "<p>这是<strong>重点</strong>内容</p>",
    "": "",
}


@pytest.mark.parametrize("text", CASES, ids=repr)
def test_rendering(renderer: Any, text: str) -> None:
    assert html(renderer, text) == CASES[text]


def test_growing_text_ends_as_whole_text(renderer: Any) -> None:
    """At every length what is shown is what that text alone would give."""
    text = "\n\n".join(CASES)
    different = renderer.evaluate(f"""(() => {{
      const text = {json.dumps(text)}, growing = view(), different = [];
      for (let end = 0; end <= text.length; end += 3) {{
        const part = text.slice(0, end);
        if (html(growing, part) !== html(view(), part)) different.push(end);
      }}
      return different;
    }})()""")
    assert different == []


@pytest.mark.parametrize(
    "piece",
    ["`", "*", "**a ", "*a ", "[", "[](", "> ", "- ", "``x` ", "|", "1. ", "http://a", "\\", "#"],
    ids=repr,
)
def test_no_text_holds_the_page_up(renderer: Any, piece: str) -> None:
    """What opens and never closes, in a line and in lines: without the renderer's bounds the
    browser would not answer within its patience."""
    for text in ((piece * 40_000)[:40_000], f"{piece}\n" * 4_000):
        assert renderer.evaluate(f"html(view(), {json.dumps(text)}).length > 0") is True
