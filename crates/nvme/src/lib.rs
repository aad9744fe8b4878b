//! The standard's words: registers, commands, completions, identify, log pages, status.
#![no_std]
#![forbid(unsafe_code)]
