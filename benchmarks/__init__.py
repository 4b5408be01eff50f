"""Time, throughput and memory of any server that speaks the Tinker protocol, seen through the public SDK.

Nothing here imports gradserve: the same code measures a peer when it is run with that peer's interpreter and SDK.
"""
