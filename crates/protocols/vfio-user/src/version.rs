//! `VFIO_USER_VERSION`: the capabilities in its JSON text.

use serde_json::{Map, Value};

use crate::wire::{DEFAULT_MAX_DATA_XFER_SIZE, DEFAULT_MAX_MSG_FDS};

/// Page sizes (`pgsizes`) that are assumed of a peer that does not state them, as a bit mask: 4096
/// bytes only.
const DEFAULT_PGSIZES: u64 = 4096;
/// Number of DMA mappings (`max_dma_maps`) that is assumed of a peer that does not state it.
const DEFAULT_MAX_DMA_MAPS: u64 = 65535;

/// Capabilities that one side has stated in the version message. Others have the specification's
/// defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Maximum number of descriptors that the side receives in one message.
    pub max_msg_fds: u64,
    /// Maximum number of bytes of one region access (its `count`).
    pub max_data_xfer_size: u64,
    /// Bit mask of the supported page sizes of DMA mappings, in bytes.
    pub pgsizes: u64,
    /// Maximum number of DMA mappings at a time.
    pub max_dma_maps: u64,
    /// Whether the side supports `VFIO_USER_REGION_WRITE_MULTI`.
    pub write_multiple: bool,
}

impl Default for Capabilities {
    fn default() -> Self {
        Self {
            max_msg_fds: DEFAULT_MAX_MSG_FDS,
            max_data_xfer_size: u64::from(DEFAULT_MAX_DATA_XFER_SIZE),
            pgsizes: DEFAULT_PGSIZES,
            max_dma_maps: DEFAULT_MAX_DMA_MAPS,
            write_multiple: false,
        }
    }
}

/// Error in the capabilities of a version message, which are JSON text.
#[derive(Debug, thiserror::Error)]
pub enum CapabilitiesError {
    /// The text is not JSON.
    #[error("version text is not JSON")]
    Json(#[from] serde_json::Error),
    /// The named capability has the wrong type.
    #[error("{0} in the version text has the wrong type")]
    Type(&'static str),
}

impl Capabilities {
    /// Parses the text of a `VFIO_USER_VERSION` message: everything after the version numbers, with
    /// or without the NUL.
    ///
    /// Unknown capabilities are ignored.
    pub fn parse(text: &[u8]) -> Result<Self, CapabilitiesError> {
        let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
        let mut stated = Self::default();
        if text.is_empty() {
            return Ok(stated);
        }
        let value: Value = serde_json::from_slice(text)?;
        let object = value
            .as_object()
            .ok_or(CapabilitiesError::Type("the whole"))?;
        let Some(capabilities) = object.get("capabilities") else {
            return Ok(stated);
        };
        let capabilities = capabilities
            .as_object()
            .ok_or(CapabilitiesError::Type("capabilities"))?;
        number(capabilities, "max_msg_fds", &mut stated.max_msg_fds)?;
        number(
            capabilities,
            "max_data_xfer_size",
            &mut stated.max_data_xfer_size,
        )?;
        number(capabilities, "pgsizes", &mut stated.pgsizes)?;
        number(capabilities, "max_dma_maps", &mut stated.max_dma_maps)?;
        if let Some(value) = capabilities.get("write_multiple") {
            stated.write_multiple = value
                .as_bool()
                .ok_or(CapabilitiesError::Type("write_multiple"))?;
        }
        Ok(stated)
    }

    /// Returns the capabilities as numbers, in the order in which the journal stores them.
    pub(crate) fn to_words(self) -> [u64; 5] {
        [
            self.max_msg_fds,
            self.max_data_xfer_size,
            self.pgsizes,
            self.max_dma_maps,
            self.write_multiple.into(),
        ]
    }

    pub(crate) fn of_words(words: [u64; 5]) -> Self {
        let [
            max_msg_fds,
            max_data_xfer_size,
            pgsizes,
            max_dma_maps,
            write_multiple,
        ] = words;
        Self {
            max_msg_fds,
            max_data_xfer_size,
            pgsizes,
            max_dma_maps,
            write_multiple: write_multiple != 0,
        }
    }

    /// Returns the text that states these capabilities in at most `limit` bytes, including the
    /// final NUL, and the capabilities that its reader will assume.
    ///
    /// QEMU reads the server's reply into the buffer of its own request, so the reply must not be
    /// longer. Capabilities are left out until it fits, beginning with the least important. A limit
    /// that equals the default adds no information. `write_multiple` only saves messages. A small
    /// `max_data_xfer_size` makes clients split accesses that they would never send to registers.
    /// Without `max_msg_fds` interrupts are assigned one by one.
    pub fn text_within(&self, limit: usize) -> (Vec<u8>, Self) {
        let mut count = 5;
        loop {
            let (capabilities, told) = self.most_important(count);
            let mut object = Map::new();
            object.insert("capabilities".to_owned(), Value::Object(capabilities));
            let mut text = Value::Object(object).to_string().into_bytes();
            text.push(0);
            if text.len() <= limit {
                return (text, told);
            }
            if count == 0 {
                // Not even an empty list fits.
                let text: &[u8] = if limit >= 3 { b"{}\0" } else { b"" };
                return (text.to_vec(), told);
            }
            count -= 1;
        }
    }

    /// Returns the `count` most important capabilities as JSON, for a peer with little room.
    fn most_important(&self, count: usize) -> (Map<String, Value>, Self) {
        let mut map = Map::new();
        let mut told = Self::default();
        if count >= 1 {
            map.insert("max_msg_fds".to_owned(), self.max_msg_fds.into());
            told.max_msg_fds = self.max_msg_fds;
        }
        if count >= 2 {
            map.insert(
                "max_data_xfer_size".to_owned(),
                self.max_data_xfer_size.into(),
            );
            told.max_data_xfer_size = self.max_data_xfer_size;
        }
        if count >= 3 && self.write_multiple {
            map.insert("write_multiple".to_owned(), true.into());
            told.write_multiple = true;
        }
        if count >= 4 {
            map.insert("pgsizes".to_owned(), self.pgsizes.into());
            told.pgsizes = self.pgsizes;
        }
        if count >= 5 {
            map.insert("max_dma_maps".to_owned(), self.max_dma_maps.into());
            told.max_dma_maps = self.max_dma_maps;
        }
        (map, told)
    }
}

fn number(
    map: &Map<String, Value>,
    name: &'static str,
    to: &mut u64,
) -> Result<(), CapabilitiesError> {
    if let Some(value) = map.get(name) {
        *to = value.as_u64().ok_or(CapabilitiesError::Type(name))?;
    }
    Ok(())
}
