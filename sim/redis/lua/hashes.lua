-- Commands on hashes. HGETALL caches its reply in `flat` until the next write. Its order is Lua's
-- own, which depends only on the earlier writes.
local parts = ...

local command, add_to_counter, fail = parts.command, parts.add_to_counter, parts.fail
local next, unpack, value, parse_integer = next, unpack, parts.value, parts.parse_integer

local UNPACKED = 1000 -- maximum of values on Lua's stack, below its limit

-- Returns the hash of a key for writing; creates it if there is none.
local function get_or_create(space, key)
  local hash = value(space, key, 'hash')
  if not hash then
    hash = {kind = 'hash', fields = {}}
    space.keys[key] = hash
  end
  hash.flat = nil
  return hash
end

command('HSET', -4, 'wm', function(space, args, n)
  if n % 2 == 1 then fail("ERR wrong number of arguments for 'hset' command") end
  local fields, new = get_or_create(space, args[2]).fields, 0
  for i = 3, n, 2 do
    local field = args[i]
    if not fields[field] then new = new + 1 end
    fields[field] = args[i + 1]
  end
  return new
end)

command('HSETNX', 4, 'wm', function(space, args)
  local fields = get_or_create(space, args[2]).fields
  if fields[args[3]] then return 0 end
  fields[args[3]] = args[4]
  return 1
end)

command('HGET', 3, '', function(space, args)
  local hash = value(space, args[2], 'hash')
  return hash and hash.fields[args[3]] or false
end)

command('HEXISTS', 3, '', function(space, args)
  local hash = value(space, args[2], 'hash')
  return hash and hash.fields[args[3]] and 1 or 0
end)

command('HMGET', -3, '', function(space, args, n)
  local hash = value(space, args[2], 'hash')
  local fields, found = hash and hash.fields or {}, {}
  for i = 3, n do found[i - 2] = fields[args[i]] or false end
  return found
end)

command('HVALS', 2, '', function(space, args)
  local hash, found = value(space, args[2], 'hash'), {}
  for _, text in pairs(hash and hash.fields or {}) do found[#found + 1] = text end
  return found
end)

command('HGETALL', 2, '', function(space, args)
  local hash = value(space, args[2], 'hash')
  if not hash then return {} end
  local flat, n = hash.flat, 0
  if not flat then
    flat = {}
    for field, text in next, hash.fields do
      flat[n + 1], flat[n + 2] = field, text
      n = n + 2
    end
    hash.flat = n <= UNPACKED and flat or nil
  end
  return hash.flat and {unpack(flat)} or flat
end)

command('HDEL', -3, 'w', function(space, args, n)
  local hash = value(space, args[2], 'hash')
  if not hash then return 0 end
  local fields, removed = hash.fields, 0
  hash.flat = nil
  for i = 3, n do
    if fields[args[i]] then
      fields[args[i]] = nil
      removed = removed + 1
    end
  end
  if next(fields) == nil then space.keys[args[2]] = nil end
  return removed
end)

command('HINCRBY', 4, 'wm', function(space, args)
  local by = parse_integer(args[4])
  local hash = value(space, args[2], 'hash')
  local field = hash and hash.fields[args[3]] or '0'
  local before = parse_integer(field, 'ERR hash value is not an integer')
  local text = add_to_counter(before, by)
  get_or_create(space, args[2]).fields[args[3]] = text
  return tonumber(text)
end)
