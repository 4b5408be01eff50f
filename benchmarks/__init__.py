"""Time, throughput and memory of any server that speaks the Tinker protocol, seen through the public SDK.

What measures a service imports nothing of gradserve: the same code measures a peer when it is run with that peer's
interpreter and SDK. What measures the engine, the trainers or control policies imports it.
"""
