"""Parts of the evaluation commands: options, scales, streams, systems, variants, the protocol and the results."""
