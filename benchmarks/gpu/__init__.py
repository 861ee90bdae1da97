"""Half an hour on a lent GPU: what only a GPU can tell, in stages that run one by one."""
