//! The standard's words: registers, commands, completions, identify, log pages, status.
//!
//! Both ends of a queue speak from this room: the controller builds what a host driver parses, out of the same types.
//! Here live layouts, bit positions, names and small pure helpers, each with its section of the standard (NVMe Base 2.1,
//! NVM Command Set 1.1, NVMe over PCIe Transport 1.1). No policy, no state, no memory access, no allocation: what a
//! controller supports, or what a host does with an answer, is decided elsewhere.
//!
//! Every wire type may be made from any bytes. Integers are little endian with alignment 1; values that the standard
//! enumerates are open (an unknown value is data); zero-based fields end in `_z`; sizes and offsets are checked at
//! compile time.
#![no_std]
#![forbid(unsafe_code)]

mod macros;

pub mod aen;
pub mod cmd;
pub mod cqe;
pub mod feature;
pub mod identify;
pub mod log;
pub mod pci;
pub mod regs;
pub mod sgl;
pub mod status;

pub use cmd::{AdminOpcode, Command, NvmOpcode};
pub use cqe::Completion;
pub use status::Status;
