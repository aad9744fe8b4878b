//! What a namespace stands on: one trait, and file (io_uring), memory, null.
