"""Write the golden files anew from the committed records; name those that differ."""

from tests.golden import FILES, write

if __name__ == "__main__":
    write(FILES)
