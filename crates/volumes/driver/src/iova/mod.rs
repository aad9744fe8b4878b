//! DMA address space of a device: allocation of addresses ([`Space`]), and mappings ([`Mapper`]).

mod mapper;
mod space;
mod tables;

pub use mapper::{MapFailure, Mapper, MapperCounters, Region, RegionTable, Registration};
pub use space::{RangeEnd, Space};
pub use tables::Tables;
