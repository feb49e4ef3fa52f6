"""Who talks to whom: rank arithmetic, process groups, communication pairs, the table of parameters, random numbers."""
