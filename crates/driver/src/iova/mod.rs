//! The addresses that a device sees: which are free ([`Space`]), and what is
//! mapped where ([`Mapper`]).

mod mapper;
mod space;
mod tables;

pub use mapper::{MapFailure, Mapper, MapperCounters, Region, Registration, Table};
pub use space::{End, Space};
pub use tables::Tables;
