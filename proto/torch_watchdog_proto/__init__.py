"""The contract between rank, node process and daemon: messages, the ring's layout, the stop protocol. ../README.md says it in words.

The words are `messages`, with `step_words`, `violation_words` and `rescue_words`; `envelopes` say who says them to whom. As JSON: `frames`; as protobuf:
`codec` with `wire_fields`. `record` is the ring. An `address` may ask for `tls`; gRPC is kept quiet by `loops`. What all sides say alike: `exit_codes`,
`names`, `checkpoint_names`, `sentences`, `lost_peers`. For tests: `fault_points`.
"""

__all__ = ["__version__"]
__version__ = "0.1.0"
