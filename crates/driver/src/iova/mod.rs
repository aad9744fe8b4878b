//! DMA address space of a device: allocation of addresses ([`Space`]), and mappings ([`Mapper`]).

mod mapper;
mod space;
mod tables;

pub use mapper::{MapFailure, Mapper, MapperCounters, Region, Registration, Table};
pub use space::{End, Space};
pub use tables::Tables;
