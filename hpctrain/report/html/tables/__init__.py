"""The tables of a report, as rows of text, so that the page only lays them out."""
