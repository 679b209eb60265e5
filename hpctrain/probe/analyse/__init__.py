"""From measurements to a topology: classes of links, clocks, and the verdict."""
