"""The run goes on when ranks are lost: a supervisor on each node starts them again in place, as many as there are."""
