// SPDX-License-Identifier: GPL-2.0-or-later

//! A QEMU TCG plugin that gives an s390x guest AP cards with accelerators.
//!
//! *Purpose.* QEMU's s390x TCG has no AP instructions: NQAP, DQAP and PQAP end in operation
//! exceptions, and the facility list lacks their bits. This plugin (API version 7, QEMU 11.1)
//! executes them instead, on the crate `ap` with `ap-accel` behind the queues. An unmodified Linux
//! then finds CEX8A cards, turns their interrupts on by AQIC, and does RSA by its zcrypt driver.
//!
//! ```text
//! qemu-system-s390x ... -plugin target/debug/libap_plugin.so,adapter=0,adapter=1,domain=6
//! ```
//!
//! *Limits.* The plugin accesses the guest's registers and memory only through the plugin API, and
//! only while QEMU runs a callback. The rules of AP are in `ap`. All unsafe code is in `ffi`, each
//! block with its reason. `machine` handles the instructions, `cpu` and `outside` connect `ap` to
//! QEMU, and `config` parses the arguments. The library is licensed as QEMU's plugin header,
//! GPL-2.0-or-later; nothing else of the project links with it.
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
//! The API has no call that makes an interruption pending, but it lets a callback write the PSW.
//! The plugin therefore does the machine's work: old PSW and interruption code to the prefix area,
//! new PSW from it, for the first processor that is open for the subclass by its PSW and control
//! register 6. Experiments showed the right places:
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
