-- Redis' cjson: an empty table is {}, numbers have 14 digits, sparse arrays are rejected.
local parts = ...

local byte, char, find, format = string.byte, string.char, string.find, string.format
local gsub, match, sub = string.gsub, string.match, string.sub
local concat, floor, huge, next, type = table.concat, math.floor, math.huge, next, type

local NULL = newproxy() -- Redis uses a light userdata, which Lua code cannot create
local MAX_DEPTH = 1000 -- maximum depth of nested tables, for both directions
-- Redis' defaults: maximum ratio of length to items, and the length up to which any ratio passes.
local SPARSE_RATIO, SPARSE_SAFE = 2, 10
local CACHE_BYTES = 2 ^ 22 -- limit of the caches: scripts encode the same rows often

local STRING_OVERHEAD_BYTES = 100 -- bytes of a short string in addition to its text

local ESCAPES = {['"'] = '\\"', ['\\'] = '\\\\', ['/'] = '\\/', ['\b'] = '\\b', ['\t'] = '\\t',
  ['\n'] = '\\n', ['\f'] = '\\f', ['\r'] = '\\r', ['\127'] = '\\u007f'}
for code = 0, 31 do
  ESCAPES[char(code)] = ESCAPES[char(code)] or format('\\u%04x', code)
end
local ESCAPED = '[%c"\\/]'

-- Caches of quoted strings and of ',"name":' labels; both are cleared when they are full.
local quoted, labels, cached_bytes = {}, {}, 0

local function cache_form(cache, text, form)
  cached_bytes = cached_bytes + #text + STRING_OVERHEAD_BYTES
  cache[text] = form
  if cached_bytes > CACHE_BYTES then quoted, labels, cached_bytes = {}, {}, 0 end
  return form
end

local function quote(text) return '"' .. gsub(text, ESCAPED, ESCAPES) .. '"' end

local function finite(number)
  if number ~= number or number == huge or number == -huge then
    error('Cannot serialise number: must not be NaN or Inf', 0)
  end
  return number
end

local function label(key)
  if type(key) == 'number' then return ',"' .. finite(key) .. '":' end
  if type(key) ~= 'string' then
    error('Cannot serialise ' .. type(key) .. ': table key must be a number or string', 0)
  end
  return cache_form(labels, key, ',' .. quote(key) .. ':')
end

-- Returns the length of an array, or nil for an object.
local function array_length(value)
  local most, items = 0, 0
  for key in next, value do
    if type(key) ~= 'number' or key < 1 or key ~= floor(key) then return nil end
    if key > most then most = key end
    items = items + 1
  end
  if most > items * SPARSE_RATIO and most > SPARSE_SAFE then
    error('Cannot serialise table: excessively sparse array', 0)
  end
  return most > 0 and most or nil
end

local put -- (buffer, n, value, depth) -> the new number of pieces in the buffer

local function put_table(buffer, n, value, depth)
  if depth > MAX_DEPTH then
    error('Cannot serialise, excessive depth (' .. depth .. ')', 0)
  end
  local length = array_length(value)
  if length then
    for i = 1, length do
      buffer[n + 1] = i == 1 and '[' or ','
      n = put(buffer, n + 1, value[i], depth)
    end
    buffer[n + 1] = ']'
    return n + 1
  end
  local first = n + 1
  for key, item in next, value do
    buffer[n + 1] = labels[key] or label(key)
    local form = quoted[item] -- most items are strings that were encoded before
    if form then
      n = n + 2
      buffer[n] = form
    else
      n = put(buffer, n + 1, item, depth)
    end
  end
  if n < first then
    buffer[first] = '{}'
    return first
  end
  buffer[first] = '{' .. sub(buffer[first], 2)
  buffer[n + 1] = '}'
  return n + 1
end

function put(buffer, n, value, depth)
  local kind = type(value)
  if kind == 'table' then return put_table(buffer, n, value, depth + 1) end
  if kind == 'string' then
    buffer[n + 1] = quoted[value] or cache_form(quoted, value, quote(value))
  elseif kind == 'number' then
    buffer[n + 1] = finite(value) -- concat formats it with 14 digits
  elseif kind == 'boolean' then
    buffer[n + 1] = value and 'true' or 'false'
  elseif value == nil or value == NULL then
    buffer[n + 1] = 'null'
  else
    error('Cannot serialise ' .. kind .. ': type not supported', 0)
  end
  return n + 1
end

local function encode(...)
  if select('#', ...) ~= 1 then error("bad argument #1 to 'encode' (expected 1 argument)", 0) end
  local value = ...
  local buffer = {}
  return concat(buffer, '', 1, put(buffer, 0, value, 0))
end

-- State of the decoder: `text` is the input. Positions count its bytes from 1. `next_slash` is the
-- position of the next backslash.
local text, next_slash

local function unexpected(what, at)
  error('Expected ' .. what .. ' but found invalid token at character ' .. at, 0)
end

-- Returns the first byte from `at` on that is not white space, and its position.
local function token(at)
  local code = byte(text, at)
  while code == 32 or code == 10 or code == 13 or code == 9 do
    at = at + 1
    code = byte(text, at)
  end
  return code, at
end

local function utf8(code)
  if code < 0x80 then return char(code) end
  if code < 0x800 then return char(0xC0 + floor(code / 64), 0x80 + code % 64) end
  if code < 0x10000 then
    return char(0xE0 + floor(code / 4096), 0x80 + floor(code / 64) % 64, 0x80 + code % 64)
  end
  return char(0xF0 + floor(code / 262144), 0x80 + floor(code / 4096) % 64,
    0x80 + floor(code / 64) % 64, 0x80 + code % 64)
end

local function hexadecimal(raw, at)
  local digits = match(raw, '^\\u(%x%x%x%x)', at)
  if not digits then unexpected('a unicode escape', at) end
  return tonumber(digits, 16)
end

-- Returns the character of the escape \uXXXX at `at` of `raw`, and the position after it.
local function decode_escape(raw, at)
  local code = hexadecimal(raw, at)
  if code < 0xD800 or code > 0xDFFF then return utf8(code), at + 6 end
  if code > 0xDBFF then unexpected('a high surrogate', at) end
  local low = hexadecimal(raw, at + 6)
  if low < 0xDC00 or low > 0xDFFF then unexpected('a low surrogate', at + 6) end
  return utf8(0x10000 + (code - 0xD800) * 1024 + low - 0xDC00), at + 12
end

local PLAIN = {['"'] = '"', ['\\'] = '\\', ['/'] = '/', b = '\b', f = '\f', n = '\n', r = '\r',
  t = '\t'}
setmetatable(PLAIN, {__index = function() unexpected('an escape that JSON has', 1) end})

local function unescape(raw)
  if not find(raw, '\\u', 1, true) then return (gsub(raw, '\\(.)', PLAIN)) end
  local pieces, at = {}, 1
  while true do
    local slash = find(raw, '\\', at, true)
    pieces[#pieces + 1] = sub(raw, at, (slash or 0) - 1)
    if not slash then return concat(pieces) end
    local name = sub(raw, slash + 1, slash + 1)
    if name == 'u' then
      pieces[#pieces + 1], at = decode_escape(raw, slash)
    else
      pieces[#pieces + 1], at = PLAIN[name], slash + 2
    end
  end
end

-- Returns the string whose opening quote is at `at`, and the position after its closing quote.
local function string_at(at)
  local close = find(text, '"', at + 1, true)
  if next_slash < at then next_slash = find(text, '\\', at, true) or #text + 1 end
  if close and close < next_slash then return sub(text, at + 1, close - 1), close + 1 end
  -- Fast path: JSON in JSON has many escaped quotes, but rarely an escaped backslash.
  local _, first = find(text, '[^\\]"', at + 1)
  local raw = first and sub(text, at + 1, first - 1)
  if not raw or find(raw, '\\\\', 1, true) then
    first = at
    repeat
      first = find(text, '["\\]', first + 1)
      local code = first and byte(text, first)
      if not code then unexpected('the end of a string', #text) end
      if code == 92 then first = first + 1 end
    until code == 34
    raw = sub(text, at + 1, first - 1)
  end
  return unescape(raw), first + 1
end

local decode_value -- (at, depth) -> the value, the position after it

local function object_at(at, depth)
  local object, code, value = {}, nil, nil
  code, at = token(at + 1)
  if code == 125 then return object, at + 1 end
  while true do
    if code ~= 34 then unexpected('object key string', at) end
    local key
    key, at = string_at(at)
    code, at = token(at)
    if code ~= 58 then unexpected('colon', at) end
    value, at = decode_value(at + 1, depth)
    object[key] = value
    code, at = token(at)
    if code == 125 then return object, at + 1 end
    if code ~= 44 then unexpected('comma or object end', at) end
    code, at = token(at + 1)
  end
end

local function array_at(at, depth)
  local array, n, code = {}, 0, nil
  code, at = token(at + 1)
  if code == 93 then return array, at + 1 end
  while true do
    n = n + 1
    array[n], at = decode_value(at, depth)
    code, at = token(at)
    if code == 93 then return array, at + 1 end
    if code ~= 44 then unexpected('comma or array end', at) end
    at = at + 1
  end
end

local WORDS = {['true'] = true, ['false'] = false, null = NULL}

local function word_at(at)
  local word = match(text, '^[+%-%w.]+', at)
  if not word then unexpected('value', at) end
  if WORDS[word] ~= nil then return WORDS[word], at + #word end
  local number = not find(word, '^[+.]') and tonumber(word)
  if not number then unexpected('value', at) end
  return number, at + #word
end

function decode_value(at, depth)
  local code
  code, at = token(at)
  if code == 34 then return string_at(at) end
  if code ~= 123 and code ~= 91 then return word_at(at) end
  if depth >= MAX_DEPTH then
    error('Found too many nested data structures (' .. depth + 1 .. ')', 0)
  end
  if code == 123 then return object_at(at, depth + 1) end
  return array_at(at, depth + 1)
end

local function decode(...)
  local input = ...
  if type(input) ~= 'string' and type(input) ~= 'number' then
    error("bad argument #1 to 'decode' (string expected, got " .. type(input) .. ')', 0)
  end
  text, next_slash = tostring(input), 0
  if find(text, '\0', 1, true) then unexpected('the end', find(text, '\0', 1, true)) end
  local value, at = decode_value(1, 0)
  local code, stop = token(at)
  if code then unexpected('the end', stop) end
  return value
end

parts.cjson = {encode = encode, decode = decode, null = NULL}
