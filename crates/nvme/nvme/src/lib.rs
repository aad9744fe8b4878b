//! Data structures of the NVMe standard: registers, commands, completions, identify, log pages,
//! status.
//!
//! Both ends of a queue use the same types: controllers build them, and host drivers parse them.
//! The crate contains layouts, bit positions, names and small pure functions, each with its section
//! of the standard (NVMe Base 2.1, NVM Command Set 1.1, NVMe over PCIe Transport 1.1). It has no
//! policy, state, memory access or allocation. Callers decide which features a controller has, and
//! how a host reacts to a completion.
//!
//! Every wire type can be created from any bytes. Integers are little endian with alignment 1.
//! Values that the standard enumerates are open: an unknown value is kept as data. Names of
//! zero-based fields end in `_z`. Sizes and offsets are checked at compile time.
//!
//! A controller reads commands, which it must not trust, and completes them:
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
//! A host creates commands and reads completions, which it must not trust:
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
//! Module [`identify`] has examples of the pages that Identify returns.
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
