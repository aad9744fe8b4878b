//! A kind of volume that was added by the recipe of [`Registry`](volume::Registry): this module,
//! and one line where the registry is made.

use std::sync::Arc;
use volume::{
    BareVolume, Completion, Info, Io, Kind, Op, OpenError, OpenOptions, OpenQueue, QueueState,
    READ_ONLY, Request, Scheme, UrlOption, Volume, VolumeError, VolumeKind, VolumeQueue, VolumeUrl,
    parse_size,
};

const SCHEME: Scheme = Scheme {
    name: "zero",
    form: "SIZE",
    example: "zero://1G",
    help: "reads as zeroes",
    options: &[
        READ_ONLY,
        UrlOption::new("colour", "red|green", "the colour of the zeroes"),
        UrlOption::new("unused", "N", "an option that the kind forgets"),
    ],
};

pub fn kind() -> VolumeKind<String> {
    VolumeKind::new(SCHEME, open)
}

fn open(url: &mut VolumeUrl<'_>, open: OpenOptions) -> Result<BareVolume<String>, OpenError> {
    let colour = |text: &str| match text {
        "red" | "green" => Ok(text.to_owned()),
        _ => Err("it is red or green"),
    };
    let colour = url.options.take("colour", colour)?;
    let volume = Zero {
        size: parse_size(url.name).map_err(|why| OpenError::Other(why.into()))?,
        read_only: url.options.read_only(&open)?,
    };
    let volume = Arc::new(volume);
    Ok(match colour {
        Some(colour) => BareVolume::attached(volume, colour),
        None => BareVolume::new(volume),
    })
}

/// A volume that reads as zeroes, and forgets written data.
#[derive(Debug)]
struct Zero {
    size: u64,
    read_only: bool,
}

impl Volume for Zero {
    fn info(&self) -> Info {
        Info {
            size: self.size,
            block_size: 1,
            optimal_io: 4096,
            read_only: self.read_only,
            volatile_cache: false,
            deallocate: !self.read_only,
            deallocate_granularity: if self.read_only { 0 } else { 4096 },
            zeroes_after_deallocate: true,
            write_zeroes: true,
            kind: Kind::Null,
            description: "zeroes".into(),
        }
    }

    fn open(&self, _: &Io) -> Result<OpenQueue, VolumeError> {
        Ok(OpenQueue::new(ZeroQueue(self.info())))
    }

    fn id(&self) -> Vec<u8> {
        format!("zero:{}", self.size).into_bytes()
    }

    fn inner(&self) -> Option<&dyn Volume> {
        None
    }
}

/// A worker's queue into it.
struct ZeroQueue(Info);

impl VolumeQueue for ZeroQueue {
    fn submit(&mut self, request: Request) -> Option<Completion> {
        let result = request.check_info(&self.0);
        if result.is_ok() && request.op == Op::Read {
            request.data.fill(0);
        }
        Some(request.complete(result))
    }

    fn poll(&mut self, _: &mut dyn FnMut(Completion)) -> usize {
        0
    }

    fn state(&self) -> QueueState {
        QueueState::IDLE
    }

    fn cancel(&mut self, _: u64) {}
}
