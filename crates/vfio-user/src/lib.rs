//! The vfio-user protocol: wire types, server, client.
#![forbid(unsafe_code)]
