// SPDX-License-Identifier: GPL-2.0-or-later

//! A QEMU TCG plugin that gives an s390x guest AP cards with accelerators.
//!
//! *What this room is for.* QEMU's s390x TCG has no AP instructions: NQAP, DQAP and PQAP end in
//! operation exceptions, and the facility list says so. This plugin (API version 7, QEMU 11.1)
//! executes them instead, on the crate `ap` with `ap-accel` behind the queues. An unmodified Linux
//! then finds CEX8A cards, turns their interrupts on by AQIC, and does RSA by its zcrypt driver.
//!
//! ```text
//! qemu-system-s390x ... -plugin target/debug/libap_plugin.so,adapter=0,adapter=1,domain=6
//! ```
//!
//! *What may be touched here.* The guest's registers and memory, by the plugin API, and only while
//! QEMU runs a callback. *What may not.* The rules of AP: they are `ap`'s. `ffi` has all the unsafe
//! code, each block with its reason; `machine` says what happens at which instruction; `cpu` and
//! `outside` are what `ap` reaches QEMU through; `config` reads the arguments. The library is
//! licensed as QEMU's plugin header, GPL-2.0-or-later; nothing else of the project links with it.
//!
//! # How
//!
//! | instruction | what happens |
//! |---|---|
//! | NQAP, DQAP, PQAP | before it: executed by `ap::instruction`, condition code set, `qemu_plugin_set_pc` behind it. A program exception is taken by hand, but the operation exception is left to QEMU |
//! | STFL, STFLE | after it: bits 12, 15 and 65 are added to what it stored |
//! | LPSWE, LPSWEY of a PSW that waits | before it, while a card works or an interruption is pending: see below |
//! | the first one of any block | while something is pending: takes an adapter interruption if the processor is open for it |
//!
//! The hooks on blocks and LPSWE are conditional on a word that QEMU tests inline, so they cost a
//! compare while nothing is pending.
//!
//! # Adapter interruptions
//!
//! The API has no call that makes an interruption pending, but it lets a callback write the PSW,
//! and so the plugin does what the machine would: old PSW and interruption code to the prefix area,
//! new PSW from it, for the first processor whose PSW and control register 6 are open for the
//! subclass. Where that is right was found out:
//!
//! - At the first instruction of a block. Within a block, QEMU's condition code may exist only in
//!   the translator's head, and the PSW that a callback reads would have an older one. (For the
//!   same reason a program interruption of an AP instruction in the middle of a block may store an
//!   older condition code. Linux ends the program anyway.)
//! - Not between EXECUTE and its target, which QEMU translates into a block of its own: the
//!   instruction at the PSW's address is then the EXECUTE, and the next block is soon enough.
//! - Before a PSW is loaded that lets the processor wait. There is no callback that could
//!   wake a waiting processor, so the interruption is taken as if it had come right after
//!   the load; and while a card still works, the plugin waits for it there, at most for the
//!   0.3 ms that a request takes.
//!
//! # Limits
//!
//! - A machine reset is not told to plugins: queues keep their state until the next kernel
//!   resets them, as Linux does.
//! - Storage keys are not looked at when operands are stored.
#![deny(unsafe_code)]

mod config;
mod cpu;
mod ffi;
mod machine;
mod outside;
