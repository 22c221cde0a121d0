"""What people do today to overlap a forward and a backward, written by us, to be measured beside weave."""
