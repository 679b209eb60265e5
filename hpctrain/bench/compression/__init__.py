"""Compare compression methods: time, bytes, convergence, and the cost of their parts."""
