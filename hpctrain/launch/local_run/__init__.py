"""A run as processes of this machine, one for each virtual node: started, watched, resumed."""
