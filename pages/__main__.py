"""Write every block of README and docs, and the pages that are made of records as a whole."""

from __future__ import annotations

from capmoe_report.records import to_lines

from capmoe_eval.report.figures.write import images_of
from pages import ROOT, fill, glance, pages, present, record_schema
from pages.blocks import BLOCKS, PICTURES


def main() -> None:
    """Write the pages that differ, and name them."""
    texts = {name: BLOCKS[name]() for name in present()}
    for path, picture in PICTURES.items():
        image = images_of(picture, ["svg"])["svg"]
        if not path.exists() or path.read_bytes() != image:
            path.write_bytes(image)
            print(f"written: {path.relative_to(ROOT)}")
    files = {glance.RECORDS: to_lines(glance.sources()), record_schema.FILE: record_schema.text()}
    for path, content in files.items():
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            path.write_text(content, encoding="utf-8")
            print(f"written: {path.relative_to(ROOT)}")
    for path in pages():
        text = path.read_text(encoding="utf-8")
        if (new := fill(text, texts)) != text:
            path.write_text(new, encoding="utf-8")
            print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
