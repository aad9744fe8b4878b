//! Shadow doorbells and EventIdx, host role and controller role.
#![no_std]
#![forbid(unsafe_code)]

mod cell;
pub mod controller;
pub mod host;
pub mod ring;

pub use cell::{Cell, Step};
pub use controller::{Armed, Cells, Invalid, Shadow, Source, Watch};
pub use host::{Compare, HostBehaviour, Publisher, Ring};
pub use ring::{advance, distance, need_event};
