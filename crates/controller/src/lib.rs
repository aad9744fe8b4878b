//! The virtual NVMe controller: registers, admin commands, queues, namespaces, events, reset.
#![forbid(unsafe_code)]
