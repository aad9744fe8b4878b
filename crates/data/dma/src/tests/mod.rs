//! Tests of internals: owners of memory, and their lifetime.

mod grace;
mod import;
#[allow(unsafe_code)]
mod private;
