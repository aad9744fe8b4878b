//! A volume that hangs: the operator's mistake rather than a client's, with a client that uses it.

use std::fs::File;

use anyhow::Result;

use super::Context;
use crate::hostile::attacks::work::transfer;
use crate::hostile::client::fuse;
use crate::hostile::client::nvme::Guest;
use crate::hostile::test_daemon::SILENT_NSID;
use nvme::NvmOpcode;

pub(super) fn silent(context: &Context) -> Result<()> {
    let mut guest = Guest::up(&context.nvme(), 2)?;
    for qid in 1..=2 {
        guest.fill(qid, &mut |at| {
            let opcode = match at % 4 {
                0 => NvmOpcode::WRITE,
                1 => NvmOpcode::FLUSH,
                _ => NvmOpcode::READ,
            };
            transfer(opcode, SILENT_NSID, u64::from(at) * 8, 8, 0)
        })?;
    }
    File::create(fuse::silence(&context.dir))?;
    context.did(1);
    guest.storm(1..=2, |count| context.did(count))
}
