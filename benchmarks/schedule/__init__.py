"""How a batch's bytes are shared by the programs of the decode kernel, in a simulated GPU."""
