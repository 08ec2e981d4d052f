"""The controller: worker groups on resource pools, and the dataflow that drives them."""
