//! Tests that look inside: what keeps memory, and for how long.

mod grace;
mod import;
#[allow(unsafe_code)]
mod private;
