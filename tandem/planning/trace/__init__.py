"""One step of the real PyTorch engine on tensors without memory: what a rank of any number of ranks would hold.

pretend   lets a torch that was built without CUDA compute with fake CUDA tensors
ledger    who made what is alive
step      the engine, its phases, and what is put in the place of the network
"""
