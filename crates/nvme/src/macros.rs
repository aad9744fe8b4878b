//! Macros that wire types are declared with, so that layouts are checked at compile time
//! and unknown values stay data.

/// Declares a transparent newtype with one constant per value that the standard names.
///
/// Any bit pattern is a valid value. `name()` gives the standard's name where there
/// is one, `Display` prints it or the number, and `from_bits`/`into_bits` let the
/// type be a field of a bitfield.
macro_rules! open_values {
    (
        $(#[$meta:meta])*
        pub $name:ident: $repr:ty {
            $($constant:ident = $value:expr, $text:literal;)*
        }
    ) => {
        $(#[$meta])*
        #[derive(
            Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default,
            zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout,
        )]
        #[repr(transparent)]
        pub struct $name(pub $repr);

        impl $name {
            $(
                #[doc = concat!($text, ".")]
                pub const $constant: Self = Self($value);
            )*

            /// The value with these bits.
            #[inline]
            pub const fn from_bits(bits: $repr) -> Self {
                Self(bits)
            }

            /// The bits of this value.
            #[inline]
            pub const fn into_bits(self) -> $repr {
                self.0
            }

            /// The standard's name, `None` for a value that it does not define.
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $(value if value == $value => Some($text),)*
                    _ => None,
                }
            }
        }

        impl From<$repr> for $name {
            #[inline]
            fn from(bits: $repr) -> Self {
                Self(bits)
            }
        }

        impl From<$name> for $repr {
            #[inline]
            fn from(value: $name) -> Self {
                value.0
            }
        }

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match self.name() {
                    Some(name) => f.pad(name),
                    None => write!(f, "{:#04x}", self.0),
                }
            }
        }

        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match self.name() {
                    Some(name) => write!(f, "{}({:#04x}, {name})", stringify!($name), self.0),
                    None => write!(f, "{}({:#04x})", stringify!($name), self.0),
                }
            }
        }
    };
}

/// Checks the size and the field offsets of a wire type at compile time,
/// against the standard's tables.
macro_rules! wire_layout {
    ($type:ty, $size:literal $(, $($field:ident @ $offset:literal),+)? $(,)?) => {
        const _: () = assert!(core::mem::size_of::<$type>() == $size);
        const _: () = assert!(core::mem::align_of::<$type>() == 1);
        $($(const _: () = assert!(core::mem::offset_of!($type, $field) == $offset);)+)?
    };
}

/// `Default` as all zeroes, for types whose arrays are too long for the derive.
macro_rules! zeroed_default {
    ($($type:ty),+ $(,)?) => {
        $(impl Default for $type {
            fn default() -> Self {
                zerocopy::FromZeros::new_zeroed()
            }
        })+
    };
}

/// Declares a wire structure with an alignment of one, whose layout is checked at compile time:
/// its size in bytes, and the offset of each field.
macro_rules! wire_struct {
    (
        $(#[$meta:meta])*
        pub struct $name:ident($size:literal) {
            $($(#[$field_meta:meta])* $vis:vis $field:ident @ $offset:literal: $type:ty,)*
        }
    ) => {
        $(#[$meta])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, zerocopy::FromBytes,
            zerocopy::IntoBytes, zerocopy::Immutable, zerocopy::KnownLayout, zerocopy::Unaligned,
        )]
        #[repr(C)]
        pub struct $name {
            $($(#[$field_meta])* $vis $field: $type,)*
        }

        crate::macros::wire_layout!($name, $size, $($field @ $offset),*);
    };
}

pub(crate) use {open_values, wire_layout, wire_struct, zeroed_default};
