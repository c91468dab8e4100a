"""Write the golden files anew from the committed records; name those that differ."""

from __future__ import annotations

from tests.golden import FILES, framed


def main() -> None:
    """Write the files that differ, and name them."""
    for path, rows in FILES.items():
        text = framed(rows()).to_csv(index=False, float_format="%.12g")
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"written: {path}")


if __name__ == "__main__":
    main()
