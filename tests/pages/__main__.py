"""Write every block of README and docs, and the pages that are made of records as a whole."""

from __future__ import annotations

from tests import bill_of_materials
from tests.pages import ROOT, fill, glance, pages, present, rehearsal
from tests.pages.blocks import BLOCKS


def main() -> None:
    """Write the pages that differ, and name them."""
    whole = {module.DOCUMENT: module.text() for module in (bill_of_materials, rehearsal)}
    texts = {name: BLOCKS[name]() for name in present()}
    image = glance.image()
    if not glance.PICTURE.exists() or glance.PICTURE.read_bytes() != image:
        glance.PICTURE.write_bytes(image)
        print(f"written: {glance.PICTURE.relative_to(ROOT)}")
    named = glance.sources().to_json()
    if not glance.RECORDS.exists() or glance.RECORDS.read_text(encoding="utf-8") != named:
        glance.RECORDS.write_text(named, encoding="utf-8")
        print(f"written: {glance.RECORDS.relative_to(ROOT)}")
    for path in pages():
        text = path.read_text(encoding="utf-8")
        if (new := whole.get(path) or fill(text, texts)) != text:
            path.write_text(new, encoding="utf-8")
            print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
