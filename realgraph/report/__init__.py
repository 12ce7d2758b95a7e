"""`realgraph report`: one page about a run, from its directory alone."""
