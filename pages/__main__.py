"""Write every block of README and docs, and the pages that are made of records as a whole."""

from capmoe_report.records import to_lines

from capmoe_eval.report.figures.command import images_of
from pages import ROOT, fill, glance, pages, present, record_schema
from pages.blocks import BLOCKS, PICTURES


def main() -> None:
    """Write the files that differ, and name them."""
    texts = {name: BLOCKS[name]() for name in present()}
    files = {path: images_of(picture, ["svg"])["svg"] for path, picture in PICTURES.items()}
    files[glance.RECORDS] = to_lines(glance.sources()).encode()
    files[record_schema.FILE] = record_schema.text().encode()
    files |= {path: fill(path.read_text(encoding="utf-8"), texts).encode() for path in pages()}
    for path, content in files.items():
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)
            print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
