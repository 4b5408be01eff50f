"""Generated protobuf messages; the source is gradserve_wire.proto."""
