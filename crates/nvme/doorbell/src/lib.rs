//! Shadow doorbells and EventIdx, host role and controller role.
//!
//! *Purpose.* Doorbell Buffer Config (NVMe Base 2.1, 5.2.5 and annex B.5) turns doorbell writes
//! into memory writes. The host publishes a queue's tail or head in the Shadow Doorbell buffer. It
//! writes the doorbell register only when it passes the controller's value in the EventIdx buffer.
//! This crate implements that protocol once, for both sides. [`Publisher`] publishes and decides
//! whether to ring. [`Watch`] reads the newest value, parks EventIdx while the controller polls and
//! arms it before the controller sleeps.
//!
//! *Scope.* 32-bit cells that the caller maps, through [`Cell`], and the plain data of one
//! doorbell. Queues, entries, buffers' addresses, their mapping and lifetime, clocks, sleeping and
//! locks belong to callers. There is no allocation and no unsafe code. Every access to a cell is
//! named by a [`ProtocolAccess`], so that models and fault injectors run the production code.
//!
//! # Controller
//!
//! ```
//! use core::sync::atomic::{AtomicU32, Ordering};
//! use doorbell::{Armed, Cells, Shadow, Watch};
//!
//! let (register, entry, eventidx) = (AtomicU32::new(7), AtomicU32::new(7), AtomicU32::new(7)); // an earlier queue's
//! let cells = Cells { register: &register, shadow: Some(Shadow { doorbell: &entry, eventidx: &eventidx }) };
//! let mut tail = Watch::create(4, cells); // then complete Create I/O Submission Queue
//!
//! entry.store(3_u32.to_le(), Ordering::Release); // the host publishes three entries
//! assert_eq!(tail.poll(cells), Ok(3)); // fetch 0..3
//! tail.park(cells); // and go on polling
//! assert_eq!(tail.poll(cells), Ok(3)); // nothing new for some time:
//! assert_eq!(tail.arm(cells), Ok(Armed::Idle)); // the next move will ring
//! assert_eq!(tail.recheck(cells), Ok(Armed::Idle)); // some microseconds later: now sleep
//! ```
//!
//! # Host
//!
//! ```
//! use core::sync::atomic::AtomicU32;
//! use doorbell::{Publisher, Ring, Shadow};
//!
//! let (entry, eventidx) = (AtomicU32::new(0), AtomicU32::new(0_u32.to_le())); // the controller is armed at 0
//! let shadow = Some(Shadow { doorbell: &entry, eventidx: &eventidx });
//! let mut tail = Publisher::new(4);
//! assert_eq!(tail.publish(shadow, 1), Ring::Register); // passes 0: write the register
//! assert_eq!(tail.publish(shadow, 2), Ring::Silent);
//! ```
//!
//! # Known failures elsewhere, and the rules against them
//!
//! Tests are in `tests/it/controller.rs` (both roles in one thread), `tests/it/arithmetic.rs` and
//! `tests/loom.rs` (every interleaving).
//!
//! | failure | rule | tests |
//! |---|---|---|
//! | buffers used after a controller-level reset | cells are borrowed per call; a reset drops every [`Watch`] before it ends, and no call writes without cells | loom `reset_*`; controller `register_only_queue_*` |
//! | queue created again with stale cells | [`Watch::create`] writes register, shadow entry and EventIdx | loom `recreation_*`, `mutants_of_queue_lifecycle_fail`; controller `recreation_*` |
//! | EventIdx of a CQ not kept up | [`Watch::arm`] when the CQ is full, [`Watch::park_until`] its tail otherwise | loom `full_cq_*`, `mutants_of_full_cq_fail`; controller `cq_*` |
//! | no full barrier between EventIdx and the look after it | [`ProtocolAccess::ArmFence`], [`ProtocolAccess::ArmShadow`] | loom `every_*`, `sleeping_*`, `mutants_of_controller_fail` |
//! | host without the barrier | [`Watch::recheck`] | loom `barrierless_*`, `mutants_of_host_fail` |
//! | EventIdx far behind or "never": a ring per turn | [`Watch::park`], proof in [`ring`] | arithmetic; controller `park_*`, `random_histories_*` |
//! | unvalidated value | [`Invalid`]; a value outside the ring is never returned | controller `invalid_*` |
//! | host that rings and never publishes | the register counts until the shadow entry changes | controller and loom `register_only_*` |
//! | register write that arrives late | a shadow host's register is no value | controller `late_register_*` |
//! | entry that comes round to its first value unseen | a second look after a new register value; EventIdx armed until the host publishes | loom `entry_back_at_first_value_*`; controller `config_on_wrapping_queue_*` |
//! | Doorbell Buffer Config on live queues, or repeated | [`Watch::attach`] | loom and controller `config_*` |
//! | buffers unmapped while queues live | the register counts from its next change on | controller `unmapped_*` |
#![no_std]
#![forbid(unsafe_code)]

mod cell;
pub mod controller;
pub mod host;
pub mod ring;

pub use cell::{Cell, ProtocolAccess};
pub use controller::{Armed, Cells, Invalid, Shadow, Source, Watch, WatchState};
pub use host::{Compare, HostBehaviour, Previous, Publisher, Ring, ShadowUse};
pub use ring::{advance, before, distance, need_event};
