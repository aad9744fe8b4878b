//! Shadow doorbells and EventIdx, host role and controller role.
#![no_std]
#![forbid(unsafe_code)]
