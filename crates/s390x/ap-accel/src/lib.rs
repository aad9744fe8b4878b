//! A cryptographic accelerator behind an AP queue: RSA in type 50 messages.
//!
//! [`Accelerator`] is an [`ap::card::Coprocessor`] that answers requests of Linux's zcrypt driver
//! to a CEX card in accelerator mode: modular exponentiation and its CRT form, of 512 to 4096 bits
//! ([`message`] has the formats, [`rsa`] the arithmetic). This crate handles the bytes of a
//! request. Queues, guests and memory are in the crate `ap`. There is no unsafe code and no state
//! between requests. An invalid request gets the error reply that the card would send, never a
//! panic.
//!
//! The arithmetic is `crypto-bigint`'s: constant-time in the secret operands, four small
//! dependencies, maintained by RustCrypto. The keys pass through and are erased when a request is
//! done.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod message;
pub mod rsa;

use alloc::vec::Vec;

use ap::Hardware;
use ap::card::Coprocessor;

pub use message::{Error, Request};

/// An emulated CEX8 cryptographic card in accelerator mode, which computes RSA operations.
#[derive(Clone, Copy, Debug, Default)]
pub struct Accelerator;

impl Coprocessor for Accelerator {
    fn hardware(&self) -> Hardware {
        Hardware {
            facilities: Hardware::MEX_4K
                | Hardware::CRT_4K
                | Hardware::ACCELERATOR
                | Hardware::APXA,
            kind: Hardware::CEX8,
            ..Hardware::default()
        }
    }

    fn process(&mut self, request: &[u8]) -> Vec<u8> {
        let result = Request::parse(request).and_then(|request| request.compute());
        match result {
            Ok(result) => message::reply(&result),
            Err(error) => message::error_reply(error).to_vec(),
        }
    }
}
