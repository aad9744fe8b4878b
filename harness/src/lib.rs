//! The guest harness: a real Linux guest under QEMU, for the demo and the tests.
#![forbid(unsafe_code)]
