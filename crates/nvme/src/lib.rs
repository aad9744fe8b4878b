//! Data structures of the NVMe standard: registers, commands, completions, identify, log pages,
//! status.
//!
//! Both ends of a queue use the same types: the controller builds them, and a host driver parses
//! them. The crate contains layouts, bit positions, names and small pure helpers, each with its
//! section of the standard (NVMe Base 2.1, NVM Command Set 1.1, NVMe over PCIe Transport 1.1). It
//! has no policy, state, memory access or allocation: the features of a controller, and a host's
//! reaction to an answer, are decided elsewhere.
//!
//! Every wire type may be made from any bytes. Integers are little endian with alignment 1; values
//! that the standard enumerates are open (an unknown value is data); zero-based fields end in `_z`;
//! sizes and offsets are checked at compile time.
//!
//! A device's side reads commands that it does not trust and answers:
//!
//! ```
//! use nvme::{AdminOpcode, Command, Completion, Status};
//! use nvme::cmd::admin::{Cns, IdentifyCdw10};
//!
//! fn answer(command: &Command, phase: bool) -> Completion {
//!     let status = match command.admin_opcode() {
//!         AdminOpcode::IDENTIFY => match IdentifyCdw10::from_bits(command.cdw10.get()).cns() {
//!             Cns::CONTROLLER | Cns::NAMESPACE => Status::SUCCESS,
//!             _ => Status::INVALID_FIELD.with_dnr(true),
//!         },
//!         _ => Status::INVALID_OPCODE.with_dnr(true),
//!     };
//!     Completion { cid: command.cid, status_phase: Completion::pack_status(status, phase), ..Default::default() }
//! }
//! # let unknown = answer(&Command::new(0xc5, 9, 0), true);
//! # assert!(unknown.status().is(Status::INVALID_OPCODE) && unknown.cid.get() == 9);
//! ```
//!
//! A host's side makes commands and reads answers that it does not trust:
//!
//! ```
//! use nvme::{AdminOpcode, Command, Completion};
//! use nvme::cmd::admin::{Cns, IdentifyCdw10};
//!
//! let mut identify = Command::new(AdminOpcode::IDENTIFY.0, 9, 0);
//! identify.cdw10 = IdentifyCdw10::new().with_cns(Cns::CONTROLLER).into_bits().into();
//! identify.set_prps(0x10_0000, 0);
//!
//! fn outcome(entry: &Completion) -> Result<u32, nvme::Status> {
//!     entry.status().into_result().map(|()| entry.dw0.get())
//! }
//! # assert_eq!(outcome(&Completion::default()), Ok(0));
//! ```
//!
//! The pages that Identify returns have examples in [`identify`].
#![no_std]
#![forbid(unsafe_code)]

mod macros;

pub mod aen;
pub mod cmd;
pub mod cqe;
pub mod fabrics;
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
