//! Mediated AP queues with interrupt control: PQAP, NQAP, DQAP and the queues behind them.
//!
//! An s390x machine has cryptographic adapters on its AP bus; each has a queue per domain. A guest
//! gets a matrix of them, and with the AQIC function of PQAP it turns a queue's interrupts on: the
//! queue then writes a notification byte in the guest's memory and raises an adapter interruption
//! of a subclass. This crate contains the mediated device between guest and queues ([`Mediated`]),
//! the instructions as the guest sees them ([`instruction`], [`intercept`], [`interruption`]), and
//! cards in software for machines that have none ([`card`]).
//!
//! The crate changes the guest's matrix, the resources held for its queues, and everything in
//! [`outside`], which are traits: guest pages, interruption subclasses, time, the queues below.
//! Real memory, threads, system calls, cryptography and QEMU belong to the callers. There is no
//! unsafe code, and no standard library.
//!
//! ```text
//! guest: PQAP, NQAP, DQAP
//!   |  a VMM that emulates all instructions: instruction::execute
//!   |  a host whose hardware interprets all but AQIC: gate::Gate, intercept::pqap
//!   v
//! Mediated: whose queue is it? what is held for it?   --- Pages: pin, unpin
//!   |                                                  --- Subclasses: register, unregister
//!   v                                                  --- Clock
//! Queues: the host's AP instructions, or card::Cards -> Coprocessor (ap-accel)
//!           |
//!           +-> Notify: the notification byte, then interruption::adapter
//! ```
//!
//! # The rules
//!
//! From the cover letter of Pierre Morel's "vfio: ap: AP Queue Interrupt Control" (v8, Linux
//! mailing list, 2019), and where it leaves details open, from `arch/s390/kvm/priv.c` and
//! `drivers/s390/crypto/vfio_ap_ops.c` of Linux. Tests without a file are in `tests/it/rules.rs`;
//! *histories* are the property tests of `tests/it/histories.rs`, each of which was seen to fail
//! when its rule was broken.
//!
//! | rule | where | test |
//! |---|---|---|
//! | **1. Interruption for AQIC** | | |
//! | the notification byte's page is pinned, its subclass registered, both or neither | `Registration::take` | `aqic_enable_pins_*`, `aqic_with_address_*`, `aqic_without_subclass_*`, histories |
//! | saved resources are freed exactly once: a registration is a value, consumed by its release | `Registration::release` | histories (pins, subclasses) |
//! | interrupts that are on already keep their settings (0x07), the new ones are dropped | [`Mediated::aqic`] | `aqic_enabled_twice_*`, histories |
//! | the guest resets behind our back and registers again: the old registration is released | [`Mediated::aqic`] | `aqic_after_unseen_reset_*`, `aqic_disable_after_*`, histories (`ResetUnseen`) |
//! | a reset that we see frees too | [`Mediated::rapq`], [`Mediated::zapq`] | `guest_reset_*`, histories |
//! | each subclass is registered as often as queues are enabled for it | all of [`mediated`] | `registrations_equal_enabled_queues` in histories |
//! | **2. The machine destroyed while the hook runs** | | |
//! | no vCPU enters the hook once the destroyer has closed the gate; it frees when all have left | [`gate`] | `tests/it/gate.rs`, `tests/loom.rs` |
//! | a destroyed guest's queues are reset, and hold nothing | [`Mediated::detach`] | `destroyed_guest_*`, histories (end) |
//! | without a guest, or a hook, queues are not available (0x01) | [`Mediated::owns`], [`intercept::pqap`] | `destroyed_guest_*`, `aqic_without_hook_*` in `intercept` |
//! | **3. Interception** | | |
//! | no AP instructions in host or guest, or no way to deliver: not supported, nothing changes | [`intercept::pqap`] | `pqap_without_facility_*` in `intercept` |
//! | only AQIC is intercepted | [`intercept::pqap`] | `pqap_other_than_aqic_*` in `intercept` |
//! | the problem state: privileged operation, before the operands are looked at | [`command::Pqap::decode`] | `pqap_in_problem_state_*` in `command`, `exceptions_*` in `intercept` and `tests/it/instructions.rs` |
//! | T bit without facility 15, AQIC without 65, QCI or long queue numbers without 12, reserved bits: specification | [`command::Pqap::decode`] | `reserved_bits_*` in `command` |
//! | odd registers of NQAP and DQAP: specification | [`instruction::execute`] | `exceptions_of_*` in `tests/it/instructions.rs` |
//! | **4. Interrupts off** | | |
//! | the page stays pinned until the interrupt bit reads zero | `Mediated::settle` | `aqic_disable_waits_*`, histories (no byte after the bit has cleared) |
//! | a bit of zero counts only after the queue accepted the order: before it may be on its way to one | `InterruptResources::Leaving` | `unmap_waits_*`, histories |
//! | a busy queue is tried again; one that is late keeps its page | `Mediated::disable`, [`Mediated::poll`] | `slow_queue_*`, `queue_reports_busy_*`, histories |
//! | a removed queue (0x01, 0x03, 0x04) cannot write any more and is released | `Mediated::settle` | `deconfigured_queue_*` |
//! | **5. Queues that are removed while in use** | | |
//! | removal of a device | [`Mediated::remove`] | `removed_queue_*`, `unplugged_card_*`, histories |
//! | unassignment of an adapter or a domain | [`Mediated::unassign_adapter`], [`Mediated::unassign_domain`] | `unassigned_queue_*`, histories |
//! | unmap of a page with a notification byte: interrupts off first, and "not yet" while the queue may write | [`Mediated::unmap`] | `unmap_*`, histories (no byte to an unmapped page) |
//! | **Queues** | | |
//! | status word and condition codes | [`status`] | `queue_status_encodes_*` in `status` |
//! | messages, identifiers, full and empty queues, requests and replies in parts | [`card`], [`instruction`] | `tests/it/instructions.rs` |
//! | only queues of the matrix with a device behind them answer | [`Mediated::owns`] | `queue_outside_matrix_*` |
//!
//! Two rules are stricter than Linux's: a page whose queue does not answer in time stays
//! pinned, where vfio_ap warns and unpins; and an interrupt bit of zero is believed only after
//! an order to turn interrupts off.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod card;
pub mod command;
pub mod gate;
pub mod information;
pub mod instruction;
pub mod intercept;
pub mod interruption;
pub mod matrix;
pub mod mediated;
pub mod outside;
mod registration;
pub mod status;

pub use command::{Facilities, InterruptControl, ProgramException, Subclass};
pub use information::{Configuration, Hardware};
pub use matrix::{Apqn, Mask, Matrix};
pub use mediated::{Mediated, Outside, StillHeld};
pub use status::{QueueStatus, Response};
