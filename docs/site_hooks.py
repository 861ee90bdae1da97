"""Hooks of MkDocs: files outside ``docs/`` become part of the site if a page links to them.

Links between files are relative, so that they work on any host of Git repositories. The site keeps
the paths of the repository, without the leading ``docs/``:

    docs/serving.md               serving.md
    CONTRIBUTING.md               CONTRIBUTING.md
    examples/train.py             examples/train.py.md, a page with the source
    benchmarks/results/x.json     benchmarks/results/x.json, as it is
    docs/notebooks/ops.ipynb      notebooks/ops.md, a page with the cells

All notebooks are pages of the section "Guides".
"""

import json
import os.path
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
# A link whose text is the name of a page, such as "[serving.md](serving.md#tools)".
_NAME = re.compile(r"\[[\w-]+\.md\](?=\(([^)#\s]*[\w-]+\.md))")
_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)((?:#[^)\s]*)?)(?=\))")
# Files that a browser would download are shown as pages.
_SOURCES = {".py": "python", ".yaml": "yaml"}


def site_path(path: str) -> str:
    """Return the path in the site of a file in the repository."""
    if Path(path).suffix in _SOURCES:
        path += ".md"
    if path.endswith(".ipynb"):
        path = path.removesuffix(".ipynb") + ".md"
    return path.removeprefix("docs/")


def linked_path(page: str, link: str) -> str:
    """Return the path in the repository of a link in the file `page`."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def linked_files(pages: list[str]) -> list[str]:
    """Return the files outside ``docs/`` that pages link to, directly or through other pages."""
    found: list[str] = []
    queue = list(pages)
    while queue:
        page = queue.pop()
        for link, _ in _LINK.findall((ROOT / page).read_text()):
            path = linked_path(page, link)
            outside = not path.startswith(("docs/", "../"))
            if outside and path not in found and (ROOT / path).is_file():
                found.append(path)
                if path.endswith(".md"):
                    queue.append(path)
    return found


def notebooks() -> list[str]:
    """Return the notebooks of the documentation, as paths in the repository."""
    found = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
    return [path.relative_to(ROOT).as_posix() for path in found]


def notebook_page(path: str) -> str:
    """Return the cells of a notebook, with their printed output, as Markdown."""
    name = posixpath.basename(path)
    parts = []
    for cell in json.loads((ROOT / path).read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"````python\n{source}\n````")
        for output in cell.get("outputs", []):
            text = output.get("text") or output.get("data", {}).get("text/plain", [])
            parts.append(f"````text\n{''.join(text)}\n````" if text else "")
    parts.append(f'<a href="../{name}" download>Download this notebook</a>')
    return "\n\n".join(parts)


def on_config(config: MkDocsConfig) -> None:
    """Add the notebooks to the section "Guides" of the navigation."""
    pages = [site_path(path) for path in notebooks()]
    for section in config.nav or []:
        if pages and "Guides" in section:
            section["Guides"].append({"Notebooks": pages})


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the notebooks, and the files outside ``docs/``, to the files of the site."""
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    for path in notebooks():
        files.append(File.generated(config, site_path(path), content=notebook_page(path)))
    for path in linked_files(pages + notebooks()):
        source, language = ROOT / path, _SOURCES.get(Path(path).suffix)
        if language:
            text = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n"
            text += f"````{language}\n{source.read_text()}````\n"
            file = File.generated(config, site_path(path), content=text)
        else:
            file = File.generated(config, site_path(path), abs_src_path=str(source))
        file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page at the paths in the site, and show the titles of the pages."""
    uri = page.file.src_uri
    path = uri if (ROOT / uri).exists() and uri != "README.md" else f"docs/{uri}"

    def link(match: re.Match[str]) -> str:
        target = site_path(linked_path(path, match[1]))
        return os.path.relpath(target, posixpath.dirname(uri) or ".") + match[2]

    def title(match: re.Match[str]) -> str:
        target = ROOT / linked_path(path, match[1])
        found = _TITLE.search(target.read_text()) if target.is_file() else None
        return f"[{found[1]}]" if found else match[0]

    markdown = _NAME.sub(title, markdown)
    return markdown if path.endswith(".py.md") else _LINK.sub(link, markdown)
