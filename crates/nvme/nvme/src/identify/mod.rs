//! Data structures that Identify returns (NVMe Base 2.1, 5.1.13; NVM Command Set 1.1, 4.1.5).
//!
//! Every page has 4096 bytes. A controller starts with `default()` (all zeroes) and sets the fields
//! that it supports. A driver reads the page from its buffer and queries the fields.
//!
//! Example of a controller:
//!
//! ```
//! use nvme::identify::{Ascii, Flbas, IdentifyController, IdentifyNamespace, LbaFormat, Oncs, QueueEntrySize};
//! use zerocopy::IntoBytes;
//!
//! let mut controller = IdentifyController {
//!     sn: Ascii::new("0001").expect("20 printable characters at most"),
//!     mdts: 8,
//!     sqes: QueueEntrySize::exactly(6),
//!     cqes: QueueEntrySize::exactly(4),
//!     oncs: Oncs::new().with_nvmdsmsv(true).with_nvmwzsv(true),
//!     ..Default::default()
//! };
//! controller.nn = 16.into();
//! let page: &[u8] = controller.as_bytes();
//! assert_eq!((page.len(), page[512], page[77]), (4096, 0x66, 8));
//!
//! let mut namespace = IdentifyNamespace { nsze: 1024.into(), ncap: 1024.into(), ..Default::default() };
//! namespace.nlbaf_z = 1;
//! namespace.lbaf[0] = LbaFormat::new(9);
//! namespace.lbaf[1] = LbaFormat::new(12);
//! namespace.flbas = Flbas::for_format(1);
//! # assert_eq!(namespace.formatted().and_then(|format| format.block_size()), Some(4096));
//! ```
//!
//! Example of a driver, which validates the values that it reads:
//!
//! ```
//! use nvme::identify::{IdentifyController, IdentifyNamespace};
//! use zerocopy::FromBytes;
//!
//! # let mut page = [0u8; 4096];
//! # page[4..24].copy_from_slice(b"0001                ");
//! # page[77] = 8;
//! let controller = IdentifyController::read_from_bytes(&page).expect("the buffer is 4096 bytes");
//! assert_eq!(controller.sn.to_string(), "0001");
//! assert_eq!(controller.mdts_bytes(4096), Some(1 << 20));
//!
//! # page[128 + 2] = 12;
//! let namespace = IdentifyNamespace::ref_from_bytes(&page).expect("the buffer is 4096 bytes");
//! let block_size = namespace.formatted().and_then(|format| format.block_size());
//! assert_eq!(block_size, Some(4096));
//! ```

mod controller;
mod controller_bits;
mod descriptors;
mod independent;
mod lists;
mod namespace;
mod namespace_bits;
mod nvm;
mod text;
mod virtualization;
mod zoned;

pub use controller::{IdentifyController, PowerState};
pub use controller_bits::{
    Anacap, Cmic, ControllerType, Ctratt, Fna, Frmw, Fuses, Lpa, Oacs, Oaes, Oncs, PowerStateFlags,
    QueueEntrySize, Sanicap, Sgls, Vwc,
};
pub use descriptors::{Descriptor, Descriptors, NamespaceDescriptors, Nidt};
pub use independent::{IndependentNamespace, IndependentNsfeat, Nstat};
pub use lists::{ControllerList, EnduranceGroupList, IoCommandSetVector, IoCommandSets, NsidList};
pub use namespace::{IdentifyNamespace, LbaFormat, RelativePerformance};
pub use namespace_bits::{Dlfeat, Dpc, Dps, Flbas, Fpi, Mc, Nmic, Nsattr, Nsfeat, Pic, Rescap};
pub use nvm::{NvmController, NvmNamespace};
pub use text::{Ascii, Nqn};
pub use virtualization::{
    Crt, PrimaryControllerCapabilities, SecondaryController, SecondaryControllerList,
};
pub use zoned::{Ozcs, ZonedController, ZonedLbaFormat, ZonedNamespace, Zrwacap};

/// Size of every Identify data structure, in bytes.
pub const IDENTIFY_SIZE: usize = 4096;
